"""What the transitions share."""
