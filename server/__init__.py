"""HTTP in, HTTP out: endpoints, wire models, output threads, and the service that composes everything."""
