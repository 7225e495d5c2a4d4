"""Reports: pages, charts, grids of pictures, and tables for terminals."""
