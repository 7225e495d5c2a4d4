"""One file a transition or a solver, and the plans and the engine that sample with them."""
