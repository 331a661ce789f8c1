"""Building blocks of pages: templates, charts and styles. Each page is one self-contained file."""
