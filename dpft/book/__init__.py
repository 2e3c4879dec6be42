"""The book behind the package: experiments, records, figures, measurements of time and memory. The core does not import it."""
