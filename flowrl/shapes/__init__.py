"""The embedded world of coloured shapes: its prompts, pictures, verifier and tiny networks."""
