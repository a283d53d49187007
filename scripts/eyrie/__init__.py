"""What Eyrie's commands share: configuration, records, stores, engines and the drafter itself."""

__version__ = "0.1.0"
