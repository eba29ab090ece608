//! `ncclConfig_t` as the library uses it (stands in until the ABI room's own).

/// The fields of `ncclConfig_t` that have a meaning here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub blocking: bool,
    pub min_ctas: Option<u32>,
    pub max_ctas: Option<u32>,
    pub net_name: Option<String>,
    pub comm_name: Option<String>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            blocking: true,
            min_ctas: None,
            max_ctas: None,
            net_name: None,
            comm_name: None,
        }
    }
}
