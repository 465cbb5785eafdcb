"""Rendering of terminal tables, HTML pages and plots."""
