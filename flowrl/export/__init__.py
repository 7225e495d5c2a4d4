"""A run's weights in the files of other programs, with a model card."""
