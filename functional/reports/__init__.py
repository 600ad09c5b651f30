"""What can be said of a program: text, pictures, residuals, work, peaks."""
