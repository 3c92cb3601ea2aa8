"""What every gRPC process does: serving, dialling."""
