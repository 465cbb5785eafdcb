"""Distributed processes, signals, files, plugin modules and errors."""
