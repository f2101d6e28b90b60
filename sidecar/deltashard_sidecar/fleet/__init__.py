"""Connection to the controller: sends reports, receives directives and save orders."""
