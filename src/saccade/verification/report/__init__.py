"""The report as text, HTML, JSON and JUnit XML."""
