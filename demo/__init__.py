"""Shows the split serving beside the unsplit: `python -m demo`. Its parts are what the end-to-end tests are made of."""
