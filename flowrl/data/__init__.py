"""Prompts and media: files of one's own, generators of prompts, folders that `flowrl score` wrote."""
