"""Tables for the terminal, HTML pages and plots."""
