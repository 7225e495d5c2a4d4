"""Code that transitions, plans and the engine share."""
