"""Support for files that were written for other projects, without changes to the files."""
