//! Round trips, and the layouts against the project's own C header and rdma-core's.

use super::*;
use proptest::prelude::*;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

/// A row of the table that C and Rust must agree on: type and field in cuda/net/mlx5.h, type and field in mlx5dv.h, offset.
const FIELDS: &[(&str, &str, &str, &str, usize)] = &[
    (
        "ControlSegment",
        "opmod_index_opcode",
        "mlx5_wqe_ctrl_seg",
        "opmod_idx_opcode",
        offset_of!(ControlSegment, opmod_index_opcode),
    ),
    (
        "ControlSegment",
        "qpn_units",
        "mlx5_wqe_ctrl_seg",
        "qpn_ds",
        offset_of!(ControlSegment, qpn_units),
    ),
    (
        "ControlSegment",
        "signature",
        "mlx5_wqe_ctrl_seg",
        "signature",
        offset_of!(ControlSegment, signature),
    ),
    (
        "ControlSegment",
        "stream_channel",
        "mlx5_wqe_ctrl_seg",
        "dci_stream_channel_id",
        offset_of!(ControlSegment, stream_channel),
    ),
    (
        "ControlSegment",
        "fm_ce_se",
        "mlx5_wqe_ctrl_seg",
        "fm_ce_se",
        offset_of!(ControlSegment, fm_ce_se),
    ),
    (
        "ControlSegment",
        "immediate",
        "mlx5_wqe_ctrl_seg",
        "imm",
        offset_of!(ControlSegment, immediate),
    ),
    (
        "RemoteSegment",
        "address",
        "mlx5_wqe_raddr_seg",
        "raddr",
        offset_of!(RemoteSegment, address),
    ),
    (
        "RemoteSegment",
        "rkey",
        "mlx5_wqe_raddr_seg",
        "rkey",
        offset_of!(RemoteSegment, rkey),
    ),
    (
        "DataSegment",
        "bytes",
        "mlx5_wqe_data_seg",
        "byte_count",
        offset_of!(DataSegment, bytes),
    ),
    (
        "DataSegment",
        "lkey",
        "mlx5_wqe_data_seg",
        "lkey",
        offset_of!(DataSegment, lkey),
    ),
    (
        "DataSegment",
        "address",
        "mlx5_wqe_data_seg",
        "addr",
        offset_of!(DataSegment, address),
    ),
    (
        "AtomicSegment",
        "swap_add",
        "mlx5_wqe_atomic_seg",
        "swap_add",
        offset_of!(AtomicSegment, swap_add),
    ),
    (
        "AtomicSegment",
        "compare",
        "mlx5_wqe_atomic_seg",
        "compare",
        offset_of!(AtomicSegment, compare),
    ),
    ("Cqe", "wqe_id", "mlx5_cqe64", "wqe_id", offset_of!(Cqe, wqe_id)),
    ("Cqe", "ml_path", "mlx5_cqe64", "ml_path", offset_of!(Cqe, ml_path)),
    ("Cqe", "slid", "mlx5_cqe64", "slid", offset_of!(Cqe, slid)),
    (
        "Cqe",
        "flags_rqpn",
        "mlx5_cqe64",
        "flags_rqpn",
        offset_of!(Cqe, flags_rqpn),
    ),
    ("Cqe", "srqn", "mlx5_cqe64", "srqn_uidx", offset_of!(Cqe, srqn)),
    (
        "Cqe",
        "immediate",
        "mlx5_cqe64",
        "imm_inval_pkey",
        offset_of!(Cqe, immediate),
    ),
    ("Cqe", "bytes", "mlx5_cqe64", "byte_cnt", offset_of!(Cqe, bytes)),
    (
        "Cqe",
        "timestamp",
        "mlx5_cqe64",
        "timestamp",
        offset_of!(Cqe, timestamp),
    ),
    (
        "Cqe",
        "opcode_qpn",
        "mlx5_cqe64",
        "sop_drop_qpn",
        offset_of!(Cqe, opcode_qpn),
    ),
    (
        "Cqe",
        "wqe_counter",
        "mlx5_cqe64",
        "wqe_counter",
        offset_of!(Cqe, wqe_counter),
    ),
    (
        "Cqe",
        "signature",
        "mlx5_cqe64",
        "signature",
        offset_of!(Cqe, signature),
    ),
    ("Cqe", "op_own", "mlx5_cqe64", "op_own", offset_of!(Cqe, op_own)),
    (
        "ErrorCqe",
        "vendor_syndrome",
        "mlx5_err_cqe",
        "vendor_err_synd",
        offset_of!(Cqe, timestamp) + 6,
    ),
    (
        "ErrorCqe",
        "syndrome",
        "mlx5_err_cqe",
        "syndrome",
        offset_of!(Cqe, timestamp) + 7,
    ),
    (
        "ErrorCqe",
        "opcode_qpn",
        "mlx5_err_cqe",
        "s_wqe_opcode_qpn",
        offset_of!(Cqe, opcode_qpn),
    ),
    (
        "ErrorCqe",
        "wqe_counter",
        "mlx5_err_cqe",
        "wqe_counter",
        offset_of!(Cqe, wqe_counter),
    ),
    ("ErrorCqe", "op_own", "mlx5_err_cqe", "op_own", offset_of!(Cqe, op_own)),
];

/// Constants of cuda/net/mlx5.h, of mlx5dv.h, and their value here.
const CONSTANTS: &[(&str, &str, u32)] = &[
    ("NOP", "MLX5_OPCODE_NOP", opcode::NOP as u32),
    ("RDMA_WRITE", "MLX5_OPCODE_RDMA_WRITE", opcode::RDMA_WRITE as u32),
    (
        "RDMA_WRITE_IMM",
        "MLX5_OPCODE_RDMA_WRITE_IMM",
        opcode::RDMA_WRITE_IMM as u32,
    ),
    ("SEND", "MLX5_OPCODE_SEND", opcode::SEND as u32),
    ("RDMA_READ", "MLX5_OPCODE_RDMA_READ", opcode::RDMA_READ as u32),
    ("ATOMIC_CS", "MLX5_OPCODE_ATOMIC_CS", opcode::ATOMIC_CS as u32),
    ("ATOMIC_FA", "MLX5_OPCODE_ATOMIC_FA", opcode::ATOMIC_FA as u32),
    ("BLOCK_BYTES", "MLX5_SEND_WQE_BB", BLOCK_BYTES as u32),
    ("INLINE_BIT", "(uint32_t)MLX5_INLINE_SEG", INLINE_BIT),
    ("COMPLETE_ALWAYS", "MLX5_WQE_CTRL_CQ_UPDATE", Report::Always as u32),
    ("SOLICITED", "MLX5_WQE_CTRL_SOLICITED", 2),
    (
        "FENCE_SMALL",
        "MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE",
        Fence::Small as u32,
    ),
    (
        "FENCE_SMALL_AND_FENCE",
        "MLX5_WQE_CTRL_FENCE",
        Fence::SmallAndFence as u32,
    ),
    ("CQE_REQ", "MLX5_CQE_REQ", KIND_REQ as u32),
    ("CQE_RESP_WRITE_IMM", "MLX5_CQE_RESP_WR_IMM", KIND_RESP_WRITE_IMM as u32),
    ("CQE_REQ_ERR", "MLX5_CQE_REQ_ERR", KIND_REQ_ERR as u32),
    ("CQE_RESP_ERR", "MLX5_CQE_RESP_ERR", KIND_RESP_ERR as u32),
    ("CQE_INVALID", "MLX5_CQE_INVALID", KIND_INVALID as u32),
    (
        "LOCAL_LENGTH",
        "MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR",
        syndrome::LOCAL_LENGTH as u32,
    ),
    (
        "LOCAL_QP_OP",
        "MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR",
        syndrome::LOCAL_QP_OP as u32,
    ),
    (
        "LOCAL_PROTECTION",
        "MLX5_CQE_SYNDROME_LOCAL_PROT_ERR",
        syndrome::LOCAL_PROTECTION as u32,
    ),
    ("WR_FLUSH", "MLX5_CQE_SYNDROME_WR_FLUSH_ERR", syndrome::WR_FLUSH as u32),
    (
        "REMOTE_INVALID_REQUEST",
        "MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR",
        syndrome::REMOTE_INVALID_REQUEST as u32,
    ),
    (
        "REMOTE_ACCESS",
        "MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR",
        syndrome::REMOTE_ACCESS as u32,
    ),
    (
        "REMOTE_OPERATION",
        "MLX5_CQE_SYNDROME_REMOTE_OP_ERR",
        syndrome::REMOTE_OPERATION as u32,
    ),
    (
        "TRANSPORT_RETRY_EXCEEDED",
        "MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR",
        syndrome::TRANSPORT_RETRY_EXCEEDED as u32,
    ),
    (
        "RNR_RETRY_EXCEEDED",
        "MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR",
        syndrome::RNR_RETRY_EXCEEDED as u32,
    ),
    ("RECORD_RECEIVE", "MLX5_RCV_DBR", 0),
    ("RECORD_SEND", "MLX5_SND_DBR", 1),
];

/// Compiles a source whose assertions are the test.
fn compiles(name: &str, source: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = Path::new(env!("OUT_DIR")).join(format!("{name}_{}.cpp", std::process::id()));
    std::fs::write(&file, source).unwrap();
    let output = Command::new("c++")
        .args(["-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", "-I"])
        .arg(root.join("cuda"))
        .arg(&file)
        .output()
        .unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn assertions(of_core: bool) -> String {
    let scope = |name: &str| {
        if of_core {
            name.to_owned()
        } else {
            format!("ossicle::mlx5::{name}")
        }
    };
    let fields = FIELDS.iter().map(|(own, own_field, core, core_field, offset)| {
        let (name, field) = if of_core { (core, core_field) } else { (own, own_field) };
        format!(
            "static_assert(offsetof({}, {field}) == {offset}, \"{name}.{field}\");\n",
            scope(name)
        )
    });
    let constants = CONSTANTS.iter().map(|(own, core, value)| {
        let name = if of_core { core } else { own };
        let name = if name.contains('(') {
            (*name).to_owned()
        } else {
            scope(name)
        };
        format!(
            "static_assert(uint32_t({name}) == {value}u, \"{}\");\n",
            name.replace('"', "")
        )
    });
    fields.chain(constants).collect()
}

#[test]
fn the_c_header_has_the_same_layout() {
    compiles("own_mlx5", &format!("#include \"net/mlx5.h\"\n{}", assertions(false)));
}

/// Where libibverbs-dev is installed, as ci/setup does it: the build of rdma-sys needs it.
#[test]
fn rdma_cores_header_has_the_same_layout() {
    let text = "#include <stddef.h>\n#include <stdint.h>\n#include <infiniband/mlx5dv.h>\n";
    compiles("core_mlx5", &format!("{text}{}", assertions(true)));
}

#[test]
fn the_sizes_are_those_of_the_card() {
    assert_eq!(std::mem::size_of::<ControlSegment>(), UNIT_BYTES);
    assert_eq!(std::mem::size_of::<RemoteSegment>(), UNIT_BYTES);
    assert_eq!(std::mem::size_of::<DataSegment>(), UNIT_BYTES);
    assert_eq!(std::mem::size_of::<AtomicSegment>(), UNIT_BYTES);
    assert_eq!(std::mem::size_of::<Cqe>(), 64);
    assert_eq!(std::mem::size_of::<DoorbellRecord>(), 8);
    assert_eq!(
        doorbell(0x12345, 0xabcdef),
        [0x00, 0x23, 0x45, 0x00, 0xab, 0xcd, 0xef, 0x00]
    );
}

fn memory() -> impl Strategy<Value = Memory> {
    (any::<u64>(), any::<u32>(), 0..INLINE_BIT).prop_map(|(address, lkey, bytes)| Memory { address, lkey, bytes })
}

/// A data list of at most a few segments; inline payload is a prefix of `PAYLOAD`.
static PAYLOAD: [u8; 200] = {
    let mut bytes = [0; 200];
    let mut i = 0;
    while i < bytes.len() {
        bytes[i] = i as u8 + 1;
        i += 1;
    }
    bytes
};

fn data() -> impl Strategy<Value = Data<'static>> {
    prop_oneof![
        memory().prop_map(Data::Memory),
        (0..PAYLOAD.len()).prop_map(|bytes| Data::Inline(&PAYLOAD[..bytes])),
    ]
}

fn operation() -> impl Strategy<Value = Operation<'static>> {
    let remote = || (any::<u64>(), any::<u32>()).prop_map(|(address, rkey)| Remote { address, rkey });
    let list = || prop::collection::vec(data(), 0..4).prop_map(List::Owned);
    prop_oneof![
        Just(Operation::Nop),
        (remote(), any::<Option<u32>>(), list()).prop_map(|(remote, immediate, data)| Operation::Write {
            remote,
            immediate,
            data
        }),
        (remote(), list()).prop_map(|(remote, sink)| Operation::Read { remote, sink }),
        (remote(), any::<u64>(), memory()).prop_map(|(remote, add, sink)| Operation::FetchAdd { remote, add, sink }),
    ]
}

fn request() -> impl Strategy<Value = Request<'static>> {
    let report = prop_oneof![
        Just(Report::OnError),
        Just(Report::OnFirstError),
        Just(Report::Always),
        Just(Report::WithEvent)
    ];
    let fence = prop_oneof![
        Just(Fence::None),
        Just(Fence::Small),
        Just(Fence::Fence),
        Just(Fence::Strong),
        Just(Fence::SmallAndFence)
    ];
    (any::<u16>(), 0..1u32 << 24, report, fence, any::<bool>(), operation()).prop_map(
        |(index, qpn, report, fence, solicited, operation)| Request {
            index,
            qpn,
            report,
            fence,
            solicited,
            operation,
        },
    )
}

proptest! {
    #[test]
    fn a_request_is_what_was_emitted(request in request()) {
        let mut bytes = [0xaa; MAX_WQE_BYTES];
        let units = request.emit(&mut bytes).unwrap();
        prop_assert_eq!(Request::parse(&bytes[..units * UNIT_BYTES]), Ok(request.clone()));
        // Not a byte less does.
        prop_assert_eq!(Request::parse(&bytes[..units * UNIT_BYTES - 1]), Err(Malformed::TooShort));
        let mut short = vec![0; units * UNIT_BYTES - 1];
        prop_assert_eq!(request.emit(&mut short), Err(Malformed::TooShort));
    }

    #[test]
    fn any_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(request) = Request::parse(&bytes) {
            let mut again = [0; MAX_WQE_BYTES];
            let units = request.emit(&mut again).unwrap();
            prop_assert_eq!(Request::parse(&again[..units * UNIT_BYTES]), Ok(request.clone()));
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let write = |data: Vec<Data<'static>>| Request {
        index: 0,
        qpn: 1,
        report: Report::Always,
        fence: Fence::None,
        solicited: false,
        operation: Operation::Write {
            remote: Remote { address: 0, rkey: 0 },
            immediate: None,
            data: List::Owned(data),
        },
    };
    let mut bytes = [0; 4096];
    let segment = Data::Memory(Memory {
        address: 0,
        lkey: 0,
        bytes: 1,
    });
    assert_eq!(write(vec![segment; 61]).emit(&mut bytes), Ok(63));
    assert_eq!(write(vec![segment; 62]).emit(&mut bytes), Err(Malformed::Units));
    static LONG: [u8; 1024] = [0; 1024];
    assert_eq!(
        write(vec![Data::Inline(&LONG)]).emit(&mut bytes),
        Err(Malformed::Segments)
    );
    let far = Request {
        qpn: 1 << 24,
        ..write(vec![])
    };
    assert_eq!(far.emit(&mut bytes), Err(Malformed::Units));
}
