"""Helpers to test and benchmark plugins: a contract test suite per plugin kind, and ranks."""
