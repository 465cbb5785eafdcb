"""Criteo's click logs (Kaggle and Terabyte): reading, conversion, and small samples."""
