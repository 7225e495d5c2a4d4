"""The embedded world of stickers: emoji on a plain background, their prompts and verifier."""
