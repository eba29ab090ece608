//! Driving mlx5 queues, whoever made them: a card or the software HCA.

mod queue;

pub use queue::{CompletionPlace, Completions, SendPlace, SendQueue};
