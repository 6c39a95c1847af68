"""Reports that people look at: one page from one document."""
