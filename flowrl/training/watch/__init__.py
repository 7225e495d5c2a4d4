"""Watchers that warn about a run or stop it: reward hacking, drift, peaks, bad numbers."""
