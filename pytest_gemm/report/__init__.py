"""Runs as reports: terminal, Markdown, HTML, GitHub, two runs compared, shards merged."""
