"""Parts of which every reward is made, and the scoring of samples."""
