"""Models in the image of those of the RecD paper (section 6.1), as registry files."""
