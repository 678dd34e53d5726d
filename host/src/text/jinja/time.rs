//! The function `strftime_now`.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

/// The time in UTC (the standard library knows no time zones), formatted as `strftime` does.
/// What it doesn't know stays as it is.
pub(super) fn strftime(format: &str, now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, second) = (seconds / 86400, seconds % 86400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let half = if hour < 12 { "AM" } else { "PM" };
    let month_name = MONTHS.get(month as usize - 1).copied().unwrap_or_default();
    let day_name = DAYS.get((days % 7) as usize).copied().unwrap_or_default();
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let padded = directive != Some('-');
        if !padded {
            directive = chars.next();
        }
        let mut number = |n: u64, width: usize| {
            let width = if padded { width } else { 0 };
            write!(out, "{n:0width$}")
        };
        // Writing into a string can't fail.
        let _ = match directive {
            Some('Y') => number(year, 4),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month, 2),
            Some('d') => number(day, 2),
            Some('H') => number(hour, 2),
            Some('I') => number((hour + 11) % 12 + 1, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('p') => out.write_str(half),
            Some('B') => out.write_str(month_name),
            Some('b') => out.write_str(&month_name[..3]),
            Some('A') => out.write_str(day_name),
            Some('a') => out.write_str(&day_name[..3]),
            Some('F') => write!(out, "{year:04}-{month:02}-{day:02}"),
            Some('T') => write!(out, "{hour:02}:{minute:02}:{second:02}"),
            Some('%') => out.write_str("%"),
            Some(other) => write!(out, "%{}{other}", if padded { "" } else { "-" }),
            None => out.write_str("%"),
        };
    }
    out
}

/// Year, month and day of the `days`th day after 1970-01-01. Howard Hinnant's algorithm: years
/// that begin in March have their leap day at the end.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn dates() {
        let at = |s| UNIX_EPOCH + Duration::from_secs(s);
        let now = at(1_709_210_096); // 2024-02-29 12:34:56
        assert_eq!(
            strftime("%d %b %Y %-m %A %j%", now),
            "29 Feb 2024 2 Thursday %j%"
        );
        assert_eq!(strftime("%F %T %I %p", now), "2024-02-29 12:34:56 12 PM");
        assert_eq!(strftime("%y-%m-%d %H %a", at(0)), "70-01-01 00 Thu");
        assert_eq!(strftime("%B", at(4_102_444_800)), "January");
    }
}
