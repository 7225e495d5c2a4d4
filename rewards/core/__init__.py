"""What every reward is made of, and how samples are scored."""
