"""What a run says about itself: certificate, pages, pictures, and the check of all of it."""
