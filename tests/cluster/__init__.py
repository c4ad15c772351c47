"""A package, so that its fixture `cluster` ends with the folder's last test."""
