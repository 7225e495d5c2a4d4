"""Parts that algorithms share."""
