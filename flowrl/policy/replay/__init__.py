"""A pipeline recorded, probed, and replayed as a differentiable function."""
