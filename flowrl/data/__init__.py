"""Prompts and media: files, generators of prompts, folders that `flowrl score` wrote."""
