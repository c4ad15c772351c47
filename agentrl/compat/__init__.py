"""What users of other projects bring along, run as it is."""
