"""Option files by group: model, algorithm, reward, data, experiment, suite."""
