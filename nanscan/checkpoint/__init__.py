"""Files that hold a state: written in one moment, with a digest of every bit, and verified when they are read."""
