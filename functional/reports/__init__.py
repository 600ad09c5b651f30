"""Reports of a program: text, pictures, residuals, work, peak memory."""
