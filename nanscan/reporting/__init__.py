"""Reports of a run from its log: reading, thinning, the page, the live line, and what is shown in notebooks."""
