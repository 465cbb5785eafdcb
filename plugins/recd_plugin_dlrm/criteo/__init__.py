"""Criteo's click logs (Kaggle and Terabyte): reading, converting, samples of the same format."""
