//! `ossicle`: what a person types to see the library at work.

mod nccl_calls;
mod perf;
mod rank_device;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(version, about = "Measures and checks Ossicle, the libnccl.so.2 in Rust")]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Times a collective and checks every element of its result
    #[command(subcommand)]
    Perf(PerfCommand),
}

#[derive(Subcommand)]
enum PerfCommand {
    /// Every rank gets the reduction of what all ranks contribute
    #[command(name = "all_reduce")]
    AllReduce(perf::options::Options),
}

fn main() -> ExitCode {
    let Command::Perf(PerfCommand::AllReduce(options)) = CommandLine::parse().command;
    perf::run(&options)
}
