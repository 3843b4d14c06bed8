"""Recipes as package data: YAML files, prompts and the pocket model."""
