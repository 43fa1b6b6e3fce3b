"""Commands that are no test run."""
