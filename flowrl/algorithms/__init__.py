"""One file an algorithm: what it needs, how it gives credit, its loss; common/ is shared."""
