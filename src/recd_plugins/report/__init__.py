"""Rendering: terminal tables, pages of HTML and plots."""
