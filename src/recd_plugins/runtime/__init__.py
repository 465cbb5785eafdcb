"""Ranks, signals, files, plugin modules and errors."""
