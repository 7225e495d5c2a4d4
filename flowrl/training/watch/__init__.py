"""What looks at a running run, and stops it: reward hacking, drift, peaks, bad numbers."""
