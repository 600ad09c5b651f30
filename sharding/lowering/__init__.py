"""From a planned program to what each rank runs."""
