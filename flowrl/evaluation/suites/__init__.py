"""Suites: models and runs side by side on a benchmark's prompts."""
