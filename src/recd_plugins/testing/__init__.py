"""Helpers to test plugins: a test suite for each plugin kind, and tests on several ranks."""
