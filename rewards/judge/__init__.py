"""Judges: vision-language models behind an OpenAI-compatible server."""
