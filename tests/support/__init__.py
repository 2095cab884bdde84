"""What the tests share; no test is in here."""
