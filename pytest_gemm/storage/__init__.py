"""Files: data files with line numbers, locks, whole-file replacement, and what is kept between runs."""
